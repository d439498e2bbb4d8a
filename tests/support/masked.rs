//! What must be masked of a text, found the slow way: every form at every place.

use base64::Engine as _;

/// Every spelling of one byte.
fn spellings(byte: u8) -> Vec<String> {
    let mut all = vec![char::from(byte).to_string()];
    for hex in [format!("{byte:02x}"), format!("{byte:02X}")] {
        all.extend([format!("%{hex}"), format!("%25{hex}"), format!("\\u00{hex}")]);
    }
    if matches!(byte, b'/' | b'"' | b'\\') {
        all.push(format!("\\{}", char::from(byte)));
    }
    all
}

/// The secret, and of its base64 behind each number of bytes what is the same whatever stands around it.
fn forms(secret: &str) -> Vec<Vec<Vec<u8>>> {
    let mut all = vec![secret.bytes().map(|byte| vec![byte]).collect()];
    for before in 0..3 {
        let encoded = |filler: u8| {
            let text = [vec![filler; before], secret.into(), vec![filler; 3]].concat();
            base64::engine::general_purpose::STANDARD.encode(text).into_bytes()
        };
        let pairs = encoded(0).into_iter().zip(encoded(255));
        let same = pairs.filter(|(one, other)| one == other).map(|(byte, _)| match byte {
            b'+' => b"+-".to_vec(),
            b'/' => b"/_".to_vec(),
            _ => vec![byte],
        });
        let same: Vec<Vec<u8>> = same.filter(|symbol| symbol != b"=").collect();
        if same.len() >= 8 {
            all.push(same);
        }
    }
    all
}

/// Where each spelling of `form` that begins at `from` ends.
fn ends(text: &[u8], from: usize, form: &[Vec<u8>]) -> Vec<usize> {
    let mut ways = vec![from];
    for symbol in form {
        let mut next = Vec::new();
        for at in ways {
            for spelling in symbol.iter().flat_map(|byte| spellings(*byte)) {
                let spelling = spelling.as_bytes();
                let here = text.get(at..at + spelling.len()).unwrap_or_default();
                // The digits of an escape have no case; a character has.
                if here == spelling || (spelling.len() > 1 && here.eq_ignore_ascii_case(spelling)) {
                    next.push(at + spelling.len());
                }
            }
        }
        next.sort_unstable();
        next.dedup();
        ways = next;
    }
    ways
}

/// `text` with every form of `secret` masked.
pub fn masked(secret: &str, text: &[u8]) -> Vec<u8> {
    let mut out = text.to_vec();
    for form in forms(secret) {
        for from in 0..text.len() {
            for end in ends(text, from, &form) {
                out[from..end].fill(b'*');
            }
        }
    }
    out
}

/// `text` in some form of it: with characters escaped, or in base64, as `choose` says.
pub fn spelled(text: &str, mut choose: impl FnMut(usize) -> usize) -> Vec<u8> {
    if choose(4) == 0 {
        let around = [&b"ab"[..choose(3)], text.as_bytes(), &b"xyz"[..choose(4)]].concat();
        let engine = &base64::engine::general_purpose::STANDARD;
        let other = &base64::engine::general_purpose::URL_SAFE_NO_PAD;
        return if choose(2) == 0 { engine.encode(around) } else { other.encode(around) }.into_bytes();
    }
    let plain = choose(2) == 0;
    let spell = |byte: u8| {
        let all = spellings(byte);
        if plain { all[0].clone() } else { all[choose(all.len())].clone() }
    };
    text.bytes().map(spell).collect::<String>().into_bytes()
}
