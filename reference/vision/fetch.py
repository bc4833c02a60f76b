"""The bytes of a picture that a client names by an address: a data: URL, or a host that was
allowed.

A server that fetches what strangers name can be sent to places that only it can reach. So nothing
is fetched unless --allowed-media-domains names the host, and then: one connection, to an address
that was looked at before, and no redirect, private address, long wait or large body.
"""

import asyncio
import base64
import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

import httpx

from lessons.toolbox.model.arguments import refuse, shown

MOST_BYTES = 8 * 2**20  # of a picture that is fetched
MOST_SECONDS = 5.0  # for all of it, as vLLM has it
LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_URL = 2048  # characters of an address that is no data: URL


def is_data(url: str) -> bool:
    """Whether an address holds the picture itself."""
    return url[:5].lower() == "data:"


def read_data_url(url: str, name: str) -> bytes:
    """data:image/png;base64,… as bytes. name: of the field. Raises ValueError."""
    head, comma, data = url[5:].partition(",")
    kind, *parameters = head.lower().split(";")
    if not comma or not kind.startswith("image/") or "base64" not in parameters:
        refuse(name, f"data:{head[:60]}", "data:image/…;base64, and the picture")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:  # wrong characters, or an end that is missing
        refuse(name, f"base64 of {len(data)} characters ({error})", "whole base64")


async def fetch(url: str, name: str, domains: list[str]) -> bytes:
    """What lies at an address. domains: hosts from which pictures may come. Raises ValueError."""
    accepted = f"a data: URL, or one of --allowed-media-domains ({', '.join(domains) or 'none'})"
    parts = split_url(url)
    if parts is None or parts.hostname not in domains:
        refuse(name, url, accepted)
    if parts.username is not None or parts.password is not None:
        refuse(name, "an address with a password", "one without")
    try:
        return await asyncio.wait_for(read(url, parts, name), MOST_SECONDS)
    except asyncio.TimeoutError:
        refuse(name, url, f"an address that answers within {MOST_SECONDS} s")
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        said = shown(str(error) or type(error).__name__)[1:-1]
        raise ValueError(
            f"{name}: got {shown(url)}, which cannot be read ({said}); accepted: {accepted}"
        ) from None


def split_url(url: str) -> SplitResult | None:
    """The parts of an http or https address; None for anything else."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # which may be no number
    except ValueError:
        return None
    is_web = parts.scheme in ("http", "https") and parts.hostname and len(url) <= MOST_URL
    return parts if is_web else None


async def address_of(parts: SplitResult, name: str) -> str:
    """The IP address of a host, if it is a public one; this machine only by its own names. Raises
    ValueError.
    """
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    for _, _, _, _, (ip, *_) in found:
        address = ipaddress.ip_address(ip.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        is_ours = address.is_loopback and parts.hostname in LOOPBACK
        # All of them, because which one answers is not ours to choose.
        if not (address.is_global or is_ours) or address.is_multicast:
            refuse(name, f"{parts.hostname} at {ip}", "hosts with public addresses")
    return found[0][4][0]


async def read(url: str, parts: SplitResult, name: str) -> bytes:
    """One GET, from the address that was looked at: a name asked twice may have two answers."""
    target = httpx.URL(url).copy_with(host=await address_of(parts, name))
    # Unpacked would be larger than what was counted.
    headers = {"Host": parts.netloc, "Accept": "image/*", "Accept-Encoding": "identity"}
    async with httpx.AsyncClient(follow_redirects=False, trust_env=False) as client:
        more = {"sni_hostname": parts.hostname}
        async with client.stream("GET", target, headers=headers, extensions=more) as answer:
            if answer.status_code != 200:
                refuse(name, f"status {answer.status_code} of {url}", "an address that answers 200")
            data = bytearray()
            async for part in answer.aiter_raw():
                data += part
                if len(data) > MOST_BYTES:
                    raise ValueError(f"{name}: got more than {MOST_BYTES} bytes; accepted: fewer")
    return bytes(data)
