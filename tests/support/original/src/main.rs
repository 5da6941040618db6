//! xchannel 2.0.0 at one end of a channel.  A payload is its number and a check word, then as many zeros as the number says.
//!
//!     original write PATH REGION ROLL FIRST COUNT     append numbers FIRST.. as fast as it goes
//!     original read PATH first|live FIRST LAST        read up to LAST, each exactly once and in order, from FIRST if not live
use std::io::{Error, Result, Write};
use xchannel::{ReaderBuilder, WriterBuilder};

const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;

fn extra(number: u64) -> usize {
    (number * 37 % 2000) as usize
}

fn write(path: &str, region: usize, roll: u64, first: u64, count: u64) -> Result<()> {
    let mut writer = WriterBuilder::new(path).region_size(region).file_roll_size(roll).build()?;
    for number in first..first + count {
        let length = 16 + extra(number);
        let room = writer.try_reserve(length)?;
        room[..8].copy_from_slice(&number.to_le_bytes());
        room[8..16].copy_from_slice(&number.wrapping_mul(MULTIPLIER).to_le_bytes());
        room[16..].fill(0);
        writer.commit(number as u16, length as u32, number)?;
    }
    Ok(())
}

fn read(path: &str, live: bool, first: u64, last: u64) -> Result<()> {
    let builder = ReaderBuilder::new(path);
    let mut reader = if live { builder.live() } else { builder.late_join() }.build()?;
    println!("attached");
    std::io::stdout().flush()?;
    let mut due = if live { None } else { Some(first) };
    loop {
        let Some(message) = reader.try_read()? else {
            std::thread::yield_now();
            continue;
        };
        let (payload, header) = (message.payload(), message.header());
        let number = u64::from_le_bytes(payload[..8].try_into().unwrap());
        let check = u64::from_le_bytes(payload[8..16].try_into().unwrap());
        let whole = check == number.wrapping_mul(MULTIPLIER)
            && payload.len() == 16 + extra(number)
            && header.message_type == number as u16
            && header.timestamp_ns == number;
        if !whole || number != *due.get_or_insert(number) {
            return Err(Error::other(format!("{number} came where {due:?} was due, whole: {whole}")));
        }
        due = Some(number + 1);
        if number == last {
            println!("read");
            return Ok(());
        }
    }
}

fn main() -> Result<()> {
    let given: Vec<String> = std::env::args().collect();
    let number = |at: usize| given[at].parse::<u64>().unwrap();
    match given[1].as_str() {
        "write" => write(&given[2], number(3) as usize, number(4), number(5), number(6)),
        _ => read(&given[2], given[3] == "live", number(4), number(5)),
    }
}
