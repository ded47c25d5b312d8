"""The process of one section: it makes the section's checks and writes each into the diary.

python -m gpu_sections.child SECTION DEVICE FOLDER SHARED DIARY
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from gpu_sections.section import NotBuilt, Place, Skipped, one_line


def main() -> int:
    """All checks of the section that the command line names; 1 where it came to no end."""
    name, device, *paths = sys.argv[1:]
    folder, shared, diary = map(Path, paths)
    place = Place(device, folder, shared, diary)
    try:
        for check in importlib.import_module(f"gpu_sections.{name}").checks(place):
            place.tell(check)
    except Skipped as reason:
        place.say(skipped=str(reason))
    except NotBuilt as what:
        place.say(not_built=str(what))
    except Exception as error:
        traceback.print_exc()
        place.say(error=one_line(f"{type(error).__name__}: {error}"))
        return 1
    place.say(is_over=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
