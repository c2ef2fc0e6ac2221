import sys

from cmsf.cli import main

sys.exit(main())
