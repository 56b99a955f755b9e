"""What operators have asked for, in a file beside the controller, so that its next life knows.

Ray keeps the arguments an actor was made with over all its lives: the configuration is there. What changed since is
here. The file belongs to one service (`service_id`), lies on the Ray head, where the controller is pinned, and is
replaced as a whole: a crash leaves the old or the new one. A file that is lost means the configured sizes.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(slots=True, kw_only=True)
class Desired:
    replicas: dict[str, int]  # by role
    drains: dict[str, float] = field(default_factory=dict)  # engine: its limit, in seconds since 1970
    is_stopping: bool = False
    life: int = 0  # of the controller, counted from 1
    port: int = 0  # of `pd.v1.Admin`; the next life takes it again, because gateways know it


class DesiredFile:
    def __init__(self, service_id: str, folder: Path | None = None) -> None:
        self._path = (folder or state_folder()) / f"{service_id}.json"
        self._saved: str | None = None

    def load(self) -> Desired | None:
        """None when there is none, or none that can be read."""
        try:
            found = json.loads(self._path.read_text())
            if found.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            return Desired(**found)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("%s cannot be used: %r; pools have their configured sizes", self._path, error)
            return None

    def save(self, desired: Desired) -> None:
        """Returns when it is written; at once when nothing has changed."""
        text = json.dumps({"format": FORMAT} | asdict(desired))
        if text == self._saved:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        self._saved = text

    def delete(self) -> None:
        self._path.unlink(missing_ok=True)


def state_folder() -> Path:
    """Where the XDG base directory specification has a user's state."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pd-service"
