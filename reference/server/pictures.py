"""Pictures in messages: OpenAI's image_url, its input_image of /v1/responses, Anthropic's image."""

import asyncio

from lessons.toolbox.model.arguments import shown
from reference.server.errors import bad_request, refused
from reference.server.protocol.chat import ChatMessage, ContentPart
from reference.server.service import Service
from reference.vision.fetch import fetch, is_data, read_data_url
from reference.vision.pictures import Picture, read_picture

IMAGE_URL = "image_url"
# A picture is seen at one size, whatever it was.
DETAILS = (None, "auto", "low")


async def pictures_of(service: Service, messages: list[ChatMessage]) -> list[Picture]:
    """The pictures of a conversation, in their order, as the model sees them.

    Raises ApiError in one line. Their number is checked before the first is fetched or decoded;
    each is decoded in a thread, so that no stream waits for it.
    """
    parts = [
        (f"messages[{at}].content[{nth}].{IMAGE_URL}", part)
        for at, message in enumerate(messages)
        if isinstance(message.content, list)
        for nth, part in enumerate(message.content)
        if part.type == IMAGE_URL
    ]
    if not parts or service.vision is None:
        return []  # chat.text_of says what a model without eyes reads
    try:
        service.vision.check_count(len(parts))
        found = []
        for name, part in parts:
            url = url_of(name, part)
            if is_data(url):
                data = read_data_url(url, name)
            else:
                data = await fetch(url, name, service.args.allowed_media_domains)
            config = service.vision.config
            found.append(await asyncio.to_thread(read_picture, data, config, name))
        return found
    except ValueError as error:
        raise bad_request(str(error), "messages") from None


def url_of(name: str, part: ContentPart) -> str:
    """The address in a part. Raises ApiError."""
    value = part.image_url
    fields = {"url": value} if isinstance(value, str) else value or {}
    if strange := fields.keys() - {"url", "detail"}:
        raise refused(name, min(strange), "url and detail")
    if fields.get("detail") not in DETAILS:
        accepted = "'auto' or 'low', because every picture is seen at one size"
        raise refused(f"{name}.detail", fields["detail"], accepted)
    url = fields.get("url")
    if not isinstance(url, str):
        raise refused(f"{name}.url", url, "a data: URL")
    return url


def of_anthropic(source: dict | None, name: str) -> dict[str, str]:
    """The source of an Anthropic image as OpenAI's image_url. Raises ApiError."""
    source = source or {}
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        return {"url": f"data:{source.get('media_type')};base64,{source['data']}"}
    if source.get("type") == "url" and isinstance(source.get("url"), str):
        return {"url": source["url"]}
    accepted = "{type: base64, media_type, data} or {type: url, url}"
    raise refused(f"{name}.source", shown(source.get("type")), accepted)
