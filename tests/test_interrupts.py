"""Interrupts at any moment: the executor that was interrupted goes on working."""

from tests.alone import run_well

_SCRIPT = """
import faulthandler, os, random, signal, sys, threading, time
import jax.numpy as jnp, numpy as np
from bucketjit import BucketedExec

seconds = float(sys.argv[1])
armed, interrupts, last = False, 0, time.monotonic()

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

def watch():
    while time.monotonic() - last < 20:
        time.sleep(1)
    faulthandler.dump_traceback()
    os._exit(3)

signal.signal(signal.SIGALRM, interrupt)
sys.unraisablehook = lambda *_: None
draw = random.Random(2)
executor = BucketedExec(jnp.tanh).with_pow2(max=64).with_maxsize(2)
executor = executor.with_background_compile()
every = {n: np.ones((n, 4), np.float32) for n in range(1, 65)}
executor(every[64])
threading.Thread(target=watch, daemon=True).start()
until = time.monotonic() + seconds
while time.monotonic() < until:
    x = every[draw.choice(list(every))]
    armed = True
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 8e-4))
        for _ in range(5):
            executor(x)
        armed = False
    except KeyboardInterrupt:
        interrupts += 1
    except Exception:  # of JAX, whose caches were interrupted
        pass
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    if interrupts % 100 == 0:
        executor.stats()
    last = time.monotonic()
executor.stats()
print("waited" if executor.wait_for_compiles(20) else "still compiling")
answers = []
# In another thread: JAX, interrupted between two lines of its own, may leave its trace in this one.
asking = threading.Thread(target=lambda: answers.append(executor(every[64])))
asking.start()
asking.join(20)
np.testing.assert_allclose(answers[0], np.tanh(every[64]), rtol=1e-6)
print(interrupts)
sys.stdout.flush()
os._exit(0)
"""


def test_an_interrupt_leaves_no_lock_held() -> None:
    waited, interrupts = run_well("-c", _SCRIPT, "4").stdout.split("\n")[:2]
    assert waited == "waited" and int(interrupts) > 100
