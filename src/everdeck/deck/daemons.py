"""Programs that put themselves into the background by default, and how each is kept in the foreground.

A worker's leader that forks a daemon and leaves has, to us, ended: what it left behind is ended too, because nobody
would watch over it. That is right, and looks like nothing at all to the person who typed ``nginx``; so it is said, with
the words to type instead where we know them.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

_FOREGROUND: Final[Mapping[str, str]] = {
    "apache2": "apache2 -DFOREGROUND",
    "chronyd": "chronyd -d",
    "cron": "cron -f",
    "crond": "crond -f",
    "dhcpd": "dhcpd -f",
    "dnsmasq": "dnsmasq --keep-in-foreground",
    "dropbear": "dropbear -F",
    "haproxy": "haproxy -db",
    "httpd": "httpd -DFOREGROUND",
    "lighttpd": "lighttpd -D",
    "mosquitto": "mosquitto without -d",
    "mpd": "mpd --no-daemon",
    "named": "named -f",
    "nginx": "nginx -g 'daemon off;'",
    "ntpd": "ntpd -n",
    "php-fpm": "php-fpm -F",
    "postfix": "postfix start-fg",
    "proftpd": "proftpd -n",
    "pulseaudio": "pulseaudio --daemonize=no",
    "redis-server": "redis-server --daemonize no",
    "rsyslogd": "rsyslogd -n",
    "slapd": "slapd -d 0",
    "smbd": "smbd -F",
    "squid": "squid -N",
    "ssh-agent": "ssh-agent -D",
    "sshd": "sshd -D",
    "supervisord": "supervisord -n",
    "transmission-daemon": "transmission-daemon -f",
    "unbound": "unbound -d",
    "valkey-server": "valkey-server --daemonize no",
    "varnishd": "varnishd -F",
}


def advice(command: Sequence[str]) -> str:
    """What to tell somebody whose worker left a daemon behind."""
    # Also behind a wrapper: `env X=1 nginx`, `/usr/sbin/php-fpm8.2 -c …`.
    for word in command:
        name = PurePath(word).name.rstrip("0123456789.")
        if name in _FOREGROUND:
            return f"run it in the foreground: {_FOREGROUND[name]}"
    return "run it in the foreground: most programs have an option for it, such as --foreground, -f or --no-daemon"
