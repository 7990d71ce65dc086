"""Tests run the same from the background of a shell, whose `&` starts its children deaf to Ctrl-C."""

import signal
import subprocess
import sys


def test_ctrl_c_is_heard_by_tests_and_by_what_they_start():
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "KeyboardInterrupt" in done.stderr
