"""Groups: any number of workers, in any number of processes, share the messages of a queue.

format    the records of a group's journal           journal   the file they are in
core      what a group decides, without I/O          group     one worker's part in it
job       a message in work                          dead      those that failed too often
"""

from penstock.log.filechannel.group.dead import DeadLetter
from penstock.log.filechannel.group.group import Group
from penstock.log.filechannel.group.job import Job, Jobs
from penstock.log.filechannel.group.options import GroupOptions
from penstock.log.filechannel.group.stats import GroupStats

__all__ = ["Group", "GroupOptions", "GroupStats", "Job", "Jobs", "DeadLetter"]
