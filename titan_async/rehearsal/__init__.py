"""A run of many ranks on one machine's CPU, one rank at a time: `titan-async rehearse`.

Each rank is built as in the real run, in a fake process group of the run's size (torch's backend "fake"),
which sends nothing. At its real width a rank is built on the meta device; it trains with every width divided
by a number, and receives noise.
"""
