"""The kernel in plain Python, module by module: slow, and the oracle the compiled one is tested against.

It promises no order between processes, so it walks only what nobody writes to any more: sealed files.
A live mmap log refuses to open on it.
"""
