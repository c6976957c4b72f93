"""For Python processes that have this folder on their path: whoever wants to reach another machine is told that there is no network, and
says so on stderr, where tests look for it."""
import errno
import os
import socket


def _refuse(what):
    os.write(2, f"NETWORK: {what}\n".encode())
    raise OSError(errno.ENETUNREACH, "no network")


def _is_here(host) -> bool:
    return host in (None, "", "localhost", "::1") or str(host).startswith("127.")


def _guard(name):
    inner = getattr(socket.socket, name)

    def guarded(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_here(address[0]):
            _refuse(address)
        return inner(self, address)

    setattr(socket.socket, name, guarded)


_guard("connect")
_guard("connect_ex")
_inner_getaddrinfo = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **more: _inner_getaddrinfo(host, *rest, **more) if _is_here(host) else _refuse(host)
