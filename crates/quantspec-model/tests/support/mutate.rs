//! Mutations of text and bytes from a fixed generator, so that failures are reproducible.

/// xorshift64*.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n.max(1)
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }
}

const NUMBERS: [&str; 24] = [
    "0",
    "1",
    "-1",
    "2",
    "7",
    "8",
    "9",
    "16",
    "255",
    "4294967295",
    "4294967296",
    "2147483648",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999999999",
    "1e308",
    "1e-308",
    "1e999",
    "0.5",
    "-0.0",
    "1e15",
    "4.0",
    "1e4",
];

const VALUES: [&str; 14] = [
    "null",
    "true",
    "false",
    "\"\"",
    "\"x\"",
    "[]",
    "{}",
    "[[[[]]]]",
    "\"\\u0000\\u001b\"",
    "[1,2,3]",
    "{\"a\":{}}",
    "\"F32\"",
    "\"../../x\"",
    "\"model.norm.weight\"",
];

/// Replaces one run of digits.
fn replace_number(text: &mut Vec<u8>, random: &mut Random) {
    let starts: Vec<usize> = (0..text.len())
        .filter(|&at| text[at].is_ascii_digit() && (at == 0 || !text[at - 1].is_ascii_digit()))
        .collect();
    let Some(&start) = starts.get(random.below(starts.len())) else { return };
    let end = (start..text.len()).find(|&at| !text[at].is_ascii_digit()).unwrap_or(text.len());
    text.splice(start..end, random.pick(&NUMBERS).bytes());
}

/// Replaces the value after a colon by another one.
fn replace_value(text: &mut Vec<u8>, random: &mut Random) {
    let colons: Vec<usize> = (0..text.len()).filter(|&at| text[at] == b':').collect();
    let Some(&colon) = colons.get(random.below(colons.len())) else { return };
    let end = (colon + 1..text.len()).find(|&at| matches!(text[at], b',' | b'}')).unwrap_or(text.len());
    let value = if random.below(4) == 0 { random.pick(&NUMBERS) } else { random.pick(&VALUES) };
    text.splice(colon + 1..end, value.bytes());
}

/// One to three changes of any kind.
pub(crate) fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let length = bytes.len();
        let (at, span) = (random.below(length), 1 + random.below(40));
        let end = length.min(at + span);
        match random.below(8) {
            0 => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
            1 => bytes.truncate(at),
            2 => drop(bytes.drain(at..end)),
            3 => {
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            4 => bytes[at..end].fill(random.next() as u8),
            5 | 6 => replace_number(bytes, random),
            _ => replace_value(bytes, random),
        }
    }
}
