"""All GPU measurements: correctness, peak rates, attention, the engine; torch and transformers for comparison.

    python scripts/gpu_report.py --part peak_rates                 # also correctness, attention, engine; or all
    python scripts/gpu_report.py --part engine --only shape=8B   # points whose name contains this
    python scripts/gpu_report.py --part attention --missing      # what an earlier run had no time for
    python scripts/gpu_report.py --part report --plots DIR       # the table and plots of what is there
    python scripts/gpu_report.py --part all --dry-run            # the same code with tiny sizes on a CPU

Run it from anywhere; the project need not be installed. Every point is written when it is measured, alongside the
file's other parts and runs. A part begins no point after `--minutes`, and ends running ones soon after. Each stage of a
part is a separate process, restarted after a failure; their output is in FILE.log.
"""

from device_report import driver
from device_report.driver import Stage

PARTS = {
    "peak_rates": (Stage("peak_rates", 1),),
    "correctness": (Stage("correctness", 6), Stage("parity", 1), Stage("suite", 4)),
    "attention": (Stage("attention", 6), Stage("torch_attention", 4)),
    "engine": (Stage("engine", 6), Stage("transformers_engine", 4)),
}


if __name__ == "__main__":
    driver.run("gpu", PARTS, __doc__)
