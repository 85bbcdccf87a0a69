"""A copy of ckpt-run that cannot use fanotify."""

# Names in the table of dynamic symbols. Both functions have the same symbol version, so that the copy still links.
INIT, MARK = b"\0fanotify_init\0", b"\0fanotify_mark\0"


def copy(program, target):
    """Writes a copy of `program` whose calls of fanotify_init reach fanotify_mark, which fails with EBADF."""
    content = program.read_bytes()
    if INIT not in content:
        raise RuntimeError(f"{program} does not call fanotify_init by name")
    # The table of dynamic symbols comes first; debug information may have the name again.
    # A program that runs cannot be overwritten.
    target.unlink(missing_ok=True)
    target.write_bytes(content.replace(INIT, MARK, 1))
    target.chmod(0o755)
