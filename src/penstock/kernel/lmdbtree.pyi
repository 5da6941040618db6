FREE: int
MAIN: int
PLAIN: int

def check_tree(
    data: object, page_bytes: int, pages: int, root: int, depth: int, kind: int, seen: object
) -> tuple[int, str] | list[int]: ...
