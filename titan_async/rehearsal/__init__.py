"""A run of many ranks on one machine's CPU, one rank at a time: `titan-async rehearse`.

Each rank is built as in the real run, in a process group that is as large as the run's and sends nothing
(torch's backend "fake"). At its real width a rank is built on the meta device; it trains with every width
divided by a number, among imaginary peers that answer with noise.
"""
