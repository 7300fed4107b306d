"""All TPU measurements: correctness, peak rates, attention by the kernel and by XLA, the engine.

    python scripts/tpu_report.py --part peak_rates                 # also correctness, attention, engine, tuning; or all
    python scripts/tpu_report.py --part engine --only shape=8B   # points whose name contains this
    python scripts/tpu_report.py --part attention --missing      # what an earlier run had no time for
    python scripts/tpu_report.py --part report --plots DIR       # the table and plots of what is there
    python scripts/tpu_report.py --part all --dry-run            # the same code with tiny sizes on a CPU

Tuning results become the kernel's block sizes by tuned_sizes.py. Needs the extra tpu and, to compare ids with
transformers, the extra test. Everything else is as in gpu_report.py.
"""

from device_report import driver
from device_report.driver import Stage

PARTS = {
    "peak_rates": (Stage("peak_rates", 1),),
    "correctness": (Stage("parity", 2), Stage("correctness", 8)),
    "attention": (Stage("attention", 1),),
    "engine": (Stage("engine", 1),),
    "tuning": (Stage("tuning", 1),),
}


if __name__ == "__main__":
    driver.run("tpu", PARTS, __doc__)
