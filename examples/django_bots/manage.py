"""A Django site with a bot for each of its users.

Run, in this directory::

    python manage.py bots keep &          # owns the deck: hears of deaths, restarts what crashed
    python manage.py bots start alice
    python manage.py runserver            # POST /bots/bob/ starts bob's, DELETE stops it, GET /bots/ lists all

Restart any of them in any order: the bots run on.
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
    execute_from_command_line(sys.argv)
