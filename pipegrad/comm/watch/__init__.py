"""What ends a job in which a rank fails or stays away, and who says why?

`watch` has the threads and the note on them. `rank_state` is what a rank is at, `failure_report`
finds the cause in the states of all ranks. `processes` asks the machine, `launcher` tells torchrun.
"""
