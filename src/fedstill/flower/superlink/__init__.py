"""The SuperLink's process: Flower's server behind a guard that bounds what a stranger, or a known site, can take of it.

`python -m fedstill.flower.superlink` runs it, and should not wait for PyTorch: nothing that needs it is imported here.
Flower has no public interface for this: what is used, or replaced, of its own is in `used`.
"""

SECRET_HEADER = "x-fedstill"
KEYS_PATH = "/fedstill/keys"  # where the server states the keys that are let in from now on
ANSWERED_PATH = "/fedstill/answered"  # where it hears which requests have been answered
PULL_PATH, PUSH_PATH = "/fedstill/pull-objects", "/fedstill/push-objects"  # several objects in one request
BUNDLE = 1 << 20  # bytes of these; what is larger is a request by itself
MOST_TOGETHER = 200  # of these: each is an object in memory, however short it is
KEEP_OPEN = 60.0  # seconds that a site's connection stays open without a request; heartbeats come each 10 to 20
HOLD = 20.0  # seconds that a request for news may wait here; Flower's clients wait 30 for a response
MOST_OBJECTS = 10_000  # in one answer
OVERHEAD = 1 << 16  # bytes of an answer that are Flower's own
REFUSED = 413
"""The code of the error by which the server learns that an answer was refused while it arrived."""
