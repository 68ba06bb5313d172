//! The format of a `.wandb` file: LevelDB's log format with a header of its own and plain CRC-32.
//!
//! The file consists of blocks of 32 KiB. A record is one chunk, or several if it does not fit into its block. A chunk has
//! the CRC of type and data (4 bytes), the length of the data (2 bytes) and its type (1 byte), in little endian.

use crc_fast::CrcAlgorithm::Crc32IsoHdlc;

/// The identifier `:W&B`, the magic number 0xBEE1 and the version.
pub(super) const FILE_HEADER: [u8; 7] = *b":W&B\xe1\xbe\0";

const BLOCK: usize = 32 << 10;
const CHUNK_HEADER: usize = 7;

const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// Returns the bytes that append `record` to a file of `file_len` bytes, header included.
pub(super) fn encode(file_len: usize, record: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(record.len() + CHUNK_HEADER);
    let (mut left, mut is_first) = (record, true);
    loop {
        let space = BLOCK - (file_len + bytes.len()) % BLOCK;
        if space < CHUNK_HEADER {
            bytes.resize(bytes.len() + space, 0);
            continue;
        }
        let (data, rest) = left.split_at(left.len().min(space - CHUNK_HEADER));
        let kind = match (is_first, rest.is_empty()) {
            (true, true) => FULL,
            (true, false) => FIRST,
            (false, false) => MIDDLE,
            (false, true) => LAST,
        };
        bytes.extend(checksum(kind, data).to_le_bytes());
        bytes.extend((data.len() as u16).to_le_bytes());
        bytes.push(kind);
        bytes.extend(data);
        if rest.is_empty() {
            return bytes;
        }
        (left, is_first) = (rest, false);
    }
}

/// Returns the complete records of a file. A damaged or incomplete chunk ends them.
pub(super) fn decode(file: &[u8]) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    let mut partial = Vec::new();
    let mut at = FILE_HEADER.len();
    if !file.starts_with(&FILE_HEADER) {
        return records;
    }
    loop {
        let space = BLOCK - at % BLOCK;
        if space < CHUNK_HEADER {
            at += space;
            continue;
        }
        let Some((kind, data)) = chunk(file, at) else { return records };
        at += CHUNK_HEADER + data.len();
        partial.extend(data);
        if [FULL, LAST].contains(&kind) {
            records.push(std::mem::take(&mut partial));
        }
    }
}

/// Returns type and data of the chunk at `at`; `None` if it is incomplete or damaged.
fn chunk(file: &[u8], at: usize) -> Option<(u8, &[u8])> {
    let header = file.get(at..at + CHUNK_HEADER)?;
    let crc = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let n_bytes = usize::from(u16::from_le_bytes([header[4], header[5]]));
    let kind = header[6];
    let data = file.get(at + CHUNK_HEADER..at + CHUNK_HEADER + n_bytes)?;
    (crc == checksum(kind, data) && (FULL..=LAST).contains(&kind)).then_some((kind, data))
}

fn checksum(kind: u8, data: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(Crc32IsoHdlc);
    digest.update(&[kind]);
    digest.update(data);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of(lengths: &[usize]) -> (Vec<u8>, Vec<Vec<u8>>) {
        let mut file = FILE_HEADER.to_vec();
        let record = |(idx, n_bytes): (usize, &usize)| (0..*n_bytes).map(|byte| (byte + idx) as u8).collect();
        let records: Vec<Vec<u8>> = lengths.iter().enumerate().map(record).collect();
        for record in &records {
            let bytes = encode(file.len(), record);
            file.extend(bytes);
        }
        (file, records)
    }

    #[track_caller]
    fn check(lengths: &[usize]) {
        let (file, records) = file_of(lengths);
        assert!(decode(&file) == records, "records of {lengths:?} bytes are not read back");
    }

    #[test]
    fn records_of_all_sizes_are_read_back() {
        check(&[]);
        check(&[1, 2, 3]);
        check(&[100_000, 1, 70_000]);
        // The first record leaves 0 to 8 bytes of its block.
        for left in 0..=8 {
            check(&[BLOCK - FILE_HEADER.len() - CHUNK_HEADER - left, 10]);
        }
    }

    #[test]
    fn an_incomplete_or_damaged_record_ends_the_records() {
        let (file, records) = file_of(&[10, 20]);
        assert_eq!(decode(&file[..file.len() - 1]), records[..1]);
        let mut damaged = file.clone();
        *damaged.last_mut().expect("the file has bytes") ^= 1;
        assert_eq!(decode(&damaged), records[..1]);
        assert_eq!(decode(b"something else"), Vec::<Vec<u8>>::new());
    }

    /// The checksum of "123456789" is the check value of CRC-32 in the catalogue of CRC algorithms.
    #[test]
    fn the_checksum_is_plain_crc_32() {
        assert_eq!(checksum(b'1', b"23456789"), 0xcbf4_3926);
    }
}
