"""What all tests need."""

import signal

# Started in the background, this process ignores Ctrl-C, and what it starts would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
