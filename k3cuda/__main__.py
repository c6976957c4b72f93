"""What the script `k3cuda` and `python -m k3cuda` call."""
import signal


def main():
    """The command. Until it answers signals itself Ctrl-C ends the process at once, as SIGTERM does: half an import would be a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as command

    command()


if __name__ == "__main__":
    main()
