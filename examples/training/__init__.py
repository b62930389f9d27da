"""The parts of examples/train.py and examples/rollout.py: a small Llama, its data, and the code that makes its training
repeatable and measured.

    text, layout, attention, ordered, clock, faults, load, safe_files   independent modules
    model, trainer, checkpoints, probe                                  modules that use these
    files, flops, report, costs, hunt                                   the files of a run, and their evaluation
    products, generation                                                of examples/rollout.py

docs/training.md explains the purpose of the runs.
"""
