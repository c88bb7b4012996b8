"""The checker that the tests put around every annotated function: beartype, with PEP 484's numbers.

There an int is accepted where a float is asked for, as every static checker does.
"""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
