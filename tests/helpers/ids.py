"""Names of test cases that are the same in every process."""

import re


def named(value):
    """The value's repr, without the address that an object's repr holds."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
