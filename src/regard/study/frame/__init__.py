"""The frame of the studies: what a study is, how it is run and resumed, how its verdict is computed, and the report."""
