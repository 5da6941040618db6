"""Follow a channel from asyncio: the event loop stays free while nothing comes."""

import asyncio
import os
import tempfile

from penstock import Reader, Writer


async def produce(writer: Writer) -> None:
    """Append a message now and then."""
    for number in range(3):
        await asyncio.sleep(0.01)
        writer.append(b"message %d" % number)


async def follow(reader: Reader) -> None:
    """Print the first three messages."""
    count = 0
    async for record in reader:
        print(bytes(record.payload).decode())
        count += 1
        if count == 3:
            return


async def main() -> None:
    """Run both on one event loop."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "channel")
        with Writer.open(path) as writer, Reader.open(path, "latest") as reader:
            await asyncio.gather(follow(reader), produce(writer))


if __name__ == "__main__":
    asyncio.run(main())
