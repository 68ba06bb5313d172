//! Functions of Jinja that minijinja lacks, or that print otherwise.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, ValueKind};
use minijinja::{Environment, Error, State, Value, functions};
use minijinja_contrib::globals as contrib;

use super::invalid;

pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_function("range", range);
    environment.add_function("dict", dict);
    environment.add_function("joiner", contrib::joiner);
    environment.add_function("cycler", |items: Rest<Value>| contrib::cycler(items.0));
    environment.add_function("lipsum", |_: &State, _: Rest<Value>| -> Result<Value, Error> {
        Err(invalid("lipsum() makes random text, so samples would differ from run to run; write the text out"))
    });
}

/// Arithmetic sequence of `range()`, which prints as in Python.
#[derive(Debug)]
pub(super) struct PythonRange {
    start: i64,
    stop: i64,
    step: i64,
}

/// Length limit of a range, as in Jinja's sandbox.
const MAX_RANGE: usize = 100_000;

fn range(first: i64, stop: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let (start, stop) = stop.map_or((0, first), |stop| (first, stop));
    let range = PythonRange { start, stop, step: step.unwrap_or(1) };
    if range.step == 0 {
        return Err(invalid("range() with a step of 0"));
    }
    match range.len() > MAX_RANGE {
        true => Err(invalid(format!("range() has {} items; the limit is {MAX_RANGE}", range.len()))),
        false => Ok(Value::from_object(range)),
    }
}

impl PythonRange {
    fn len(&self) -> usize {
        let (distance, step) = (i128::from(self.stop) - i128::from(self.start), i128::from(self.step));
        let n_items = (distance + step - step.signum()) / step;
        usize::try_from(n_items).unwrap_or(if n_items < 0 { 0 } else { usize::MAX })
    }
}

impl Object for PythonRange {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let idx = key.as_usize().filter(|idx| *idx < self.len())?;
        Some(Value::from(self.start + idx as i64 * self.step))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { start, stop, step } = **self;
        match step {
            1 => write!(f, "range({start}, {stop})"),
            step => write!(f, "range({start}, {stop}, {step})"),
        }
    }
}

/// Creates a dict from another one, or from pairs, and from named values.
fn dict(value: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let pairs = match value {
        Some(pairs) if matches!(pairs.kind(), ValueKind::Seq | ValueKind::Iterable) => pairs,
        other => return functions::dict(other, named),
    };
    let mut found = Vec::new();
    for pair in pairs.try_iter()? {
        let items: Vec<Value> = pair.try_iter()?.collect();
        let [key, value] = <[Value; 2]>::try_from(items).map_err(|_| invalid("dict() needs pairs of key and value"))?;
        found.push((key, value));
    }
    functions::dict(Some(Value::from_pairs(found)), named)
}
