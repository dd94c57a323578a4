from __future__ import annotations

import sys
from pathlib import Path

from scripts.scale import year
from tests.simulation.scheduler import require_fixed_hashes

require_fixed_hashes("scripts.scale")
year.run(Path(sys.argv[3]), days=int(sys.argv[1]), commits=int(sys.argv[2]))
