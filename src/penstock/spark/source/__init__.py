"""Channels and tables as DataFrames: planning, reading, streaming, and the fused export."""
