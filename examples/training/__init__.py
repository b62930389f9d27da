"""The parts of examples/train.py: a small Llama, its data, and what makes its training repeat and be measured.

    text, layout, attention, ordered, clock, faults, load, safe_files   what stands alone
    model, trainer, checkpoints, probe                                  made of these
    files, flops, report, costs, hunt                                   what a run leaves behind, and what is made of it

docs/training.md tells what the runs are for.
"""
