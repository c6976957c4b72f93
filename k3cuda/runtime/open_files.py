"""How many files and connections this process may have open."""
import logging

log = logging.getLogger("k3cuda")

OPEN_FILES = 65_536


def raise_file_limit() -> None:
    """Each connection is an open file, and the usual soft limit of 1,024 is soon reached; the hard one is there to be used."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < OPEN_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES), hard))
    except (ImportError, OSError, ValueError) as e:   # not a POSIX system, or one that does not allow it
        log.debug("the limit of open files stays as it is: %s", e)
