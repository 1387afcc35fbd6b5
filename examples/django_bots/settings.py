"""The least that a site needs; ``BOTS_STATE`` is where the deck lies."""

import os
from pathlib import Path

SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "an example's, and nobody else's")
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
INSTALLED_APPS = ["bots"]
ROOT_URLCONF = "bots.urls"
BOTS_STATE = Path(os.environ.get("BOTS_STATE", "bots-state"))
