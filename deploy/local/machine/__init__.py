"""What local programs need of this machine: folders, ports, packages, processes and bounded waits."""
