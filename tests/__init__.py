import os

# OpenMP's threads wait for work in a loop that takes a core; here several tests, of several processes each, share few.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, here and in what tests start
