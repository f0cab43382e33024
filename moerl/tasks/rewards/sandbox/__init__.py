"""A sandbox for programs that nobody has looked at, and for their tests: a process for each (`start`).

    process of a reward ── start ─► the program                                if it reads and writes standard streams
                        ── start ─► the tests ─┬─ fork ─► the program          if the tests are Python
                              ▲                │
                              └── exit code    └── values as JSON, over two pipes

Every process restricts itself for good (`limits`, `calls`) before it runs a line that is not ours. The process of the
tests starts the program's, waits until the program has come to its end, and runs the tests. Names that the tests do not
define are the program's: a function or object is asked over the pipes (`peer`, `testing`, `program`), values are copies
(`values`). The program has no descriptor, file or memory of the tests and can send no signal, so the exit code of the
tests is a verdict that it cannot reach. The package imports the standard library alone.
"""
