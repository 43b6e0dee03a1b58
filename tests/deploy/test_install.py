"""What the installation has installed."""

import subprocess
import sys


def test_packages_of_the_lock_suit_each_other():
    """They are installed without resolving dependencies, so pip does not check this by itself."""
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, check=False)

    assert checked.returncode == 0, checked.stdout
