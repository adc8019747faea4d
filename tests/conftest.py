import os

# The checkout holds no compiled module: a Python that a test starts there must look for the installed package instead.
os.environ["PYTHONSAFEPATH"] = "1"
