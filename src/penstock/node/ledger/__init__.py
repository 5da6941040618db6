"""The ledger: for each seam of a node, what came in is what went on, what waits, or what was lost for a stated reason.

seams      which seams a node has, kept beside its data so that anybody can count them
totals     how many records a log ever had up to a position, remembered so that retention takes nothing from it
reckon     the figures of each seam, from logs, cursors and stores alone
book       what is remembered: totals, the figures of each hour, when a seam was last right
part       looks again and again, and raises an alarm that names the span
"""

from penstock.node.ledger.reckon import SeamCount, read_ledger

__all__ = ["SeamCount", "read_ledger"]
