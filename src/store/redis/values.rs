//! Reading what scripts answer. A server can answer anything; what does not fit is nonsense, never a panic.

use redis::Value;

use crate::store::StoreError;

pub(super) fn nonsense(what: &str) -> StoreError {
    StoreError::Nonsense(format!("redis answered {what}; does another program write under store.prefix?"))
}

/// A list's parts, taken one after the other.
pub(super) struct Reader(std::vec::IntoIter<Value>);

impl Reader {
    pub(super) fn of(value: Value) -> Result<Self, StoreError> {
        match value {
            Value::Array(parts) | Value::Set(parts) => Ok(Self(parts.into_iter())),
            Value::Map(pairs) => {
                let parts: Vec<Value> = pairs.into_iter().flat_map(|(name, value)| [name, value]).collect();
                Ok(Self(parts.into_iter()))
            }
            Value::Nil => Ok(Self(Vec::new().into_iter())),
            _ => Err(nonsense("no list where one was due")),
        }
    }

    pub(super) fn value(&mut self) -> Result<Value, StoreError> {
        self.0.next().ok_or_else(|| nonsense("a list that is too short"))
    }

    pub(super) fn list(&mut self) -> Result<Self, StoreError> {
        Self::of(self.value()?)
    }

    pub(super) fn number(&mut self) -> Result<i64, StoreError> {
        number(&self.value()?)
    }

    /// A number that is not below zero.
    pub(super) fn count(&mut self) -> Result<u64, StoreError> {
        u64::try_from(self.number()?).map_err(|_| nonsense("a number below zero"))
    }

    pub(super) fn text(&mut self) -> Result<String, StoreError> {
        text(self.value()?)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.len() == 0
    }
}

pub(super) fn number(value: &Value) -> Result<i64, StoreError> {
    match value {
        Value::Int(number) => Ok(*number),
        // A score, as RESP3 gives it: ms since 1970 fit a double exactly for 285,000 years.
        #[allow(clippy::cast_possible_truncation)]
        Value::Double(number) if number.abs() < 9.0e15 => Ok(*number as i64),
        Value::BulkString(bytes) => std::str::from_utf8(bytes)
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| nonsense("text where a number was due")),
        Value::SimpleString(text) => text.parse().map_err(|_| nonsense("text where a number was due")),
        _ => Err(nonsense("no number where one was due")),
    }
}

pub(super) fn bytes(value: Value) -> Result<Vec<u8>, StoreError> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        _ => Err(nonsense("no bytes where some were due")),
    }
}

pub(super) fn text(value: Value) -> Result<String, StoreError> {
    match value {
        // Lossy: a stray byte in one row must not hide the others, and what is no name is skipped as such.
        Value::BulkString(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Ok(text),
        Value::Int(number) => Ok(number.to_string()),
        Value::Nil => Ok(String::new()),
        _ => Err(nonsense("no text where some was due")),
    }
}
