//! Which machine a process runs on.

use std::fs;

use crate::{Collective, Result, exchange_bytes};

/// Tells whether this is the first of a group's ranks on its machine, whatever local ranks they were given. All ranks call it.
pub fn is_first_of_machine(group: &dyn Collective) -> Result<bool> {
    let all = exchange_bytes(group, this().as_bytes())?;
    Ok(first_of_each(&all)[group.rank()])
}

/// Names this machine: a container has a name of its own, and machines of one name differ in when they were started.
fn this() -> String {
    let read = |file: &str| fs::read_to_string(format!("/proc/sys/kernel/{file}")).unwrap_or_default();
    format!("{} {}", read("hostname").trim(), boot().unwrap_or_default())
}

/// What differs between any two machines that are up; containers of one machine share it.
pub(crate) fn boot() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|boot| boot.trim().to_owned())
}

/// Whether each is the first of its name.
fn first_of_each(names: &[Vec<u8>]) -> Vec<bool> {
    names.iter().enumerate().map(|(at, name)| !names[..at].contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, threads};

    #[test]
    fn each_machine_has_one_first_rank() {
        let names = ["b", "a", "b", "c", "a"].map(|name| name.as_bytes().to_vec());
        assert_eq!(first_of_each(&names), [true, true, false, true, false]);
        let here = threads::run(3, Options::default(), |world| is_first_of_machine(&*world.group()));
        assert_eq!(here.expect("all call it"), [true, false, false]);
    }
}
