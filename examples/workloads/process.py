"""Runs a command that does not outlive its caller. Standard library only."""

import contextlib
import os
import signal
import subprocess


class Failure(Exception):
    """One run of a workload did not end well; says why."""


def run(command, timeout):
    """Exit code, standard output and standard error of a command, which is in a process group of its own.

    It does not outlive this: Ctrl-C and the time limit end it with all its children.
    """
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise Failure(f"{command[0]}: {error.strerror}") from None
    try:
        out, err = child.communicate(timeout=timeout)
        return child.returncode, out, err
    except subprocess.TimeoutExpired:
        raise Failure(f"did not end within {timeout:.0f} s") from None
    finally:
        # Also what the command left running.
        stop(child)


def stop(child):
    for number, patience in ((signal.SIGINT, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
            if number == signal.SIGINT:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
            return
