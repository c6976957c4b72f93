"""Coroutines that a signal ends between two steps of their loop, never in the middle of one."""
import asyncio
import signal
import threading

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(runner: asyncio.Runner, work):
    """What the coroutine `work` returns. A signal that is listened to cancels it and is raised when it has ended; the second one kills."""
    async def listening():
        loop, task = runner.get_loop(), asyncio.current_task()
        before = {n: signal.getsignal(n) for n in _SIGNALS} if threading.current_thread() is threading.main_thread() else {}
        heard = {n: handler for n, handler in before.items() if callable(handler)}

        def stop(number: int) -> None:
            for n in heard:
                loop.remove_signal_handler(n)
                signal.signal(n, signal.SIG_DFL)
            try:
                heard[number](number, None)
            except KeyboardInterrupt as e:
                stopped.append(e)
                task.cancel()

        for number in heard:
            loop.add_signal_handler(number, stop, number)
        try:
            return await work
        finally:
            for number, handler in heard.items():
                if not stopped:
                    loop.remove_signal_handler(number)
                    signal.signal(number, handler)

    stopped = []
    try:
        return runner.run(listening())
    except asyncio.CancelledError:
        if stopped:
            raise stopped[0] from None
        raise
