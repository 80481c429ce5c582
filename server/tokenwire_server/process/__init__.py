"""The process: its command line, its life from start to end, and the processes that it leaves none of."""
