"""What this project cannot prove on a CPU: ``python -m benchmarks.gpu``, or ``make gpu``.

`__main__` runs the sections, each in a process of its own (`section`), and keeps their figures in results/gpu.json.
`tables` makes the tables of docs/performance.md from that file, `targets` compares the figures with what was aimed at.
"""
