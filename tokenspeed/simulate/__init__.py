"""What `tokenspeed simulate` is made of: traces, generators, step costs, the run and its report (docs/simulator.md).

The scheduler and its virtual time are C++ (csrc/simulate); here is what comes before and after them.
"""
