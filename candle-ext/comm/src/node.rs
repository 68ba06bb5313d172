//! Identity of the node that a process runs on.

use std::fs;

use crate::{Collective, Result, exchange_bytes};

/// Returns true if this is the group's lowest rank on its node, independent of local ranks. Collective: all ranks call it.
pub fn is_first_on_node(group: &dyn Collective) -> Result<bool> {
    let all = exchange_bytes(group, node_name().as_bytes())?;
    Ok(first_of_each(&all)[group.rank()])
}

/// Returns the node's name and boot id. A container has its own name; nodes of one name differ in the boot id.
fn node_name() -> String {
    let read = |file: &str| fs::read_to_string(format!("/proc/sys/kernel/{file}")).unwrap_or_default();
    format!("{} {}", read("hostname").trim(), boot_id().unwrap_or_default())
}

/// Returns the kernel's boot id, which differs between any two running machines. Containers of one machine share it.
pub(crate) fn boot_id() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|boot| boot.trim().to_owned())
}

/// Returns for each name whether it is the first occurrence.
fn first_of_each(names: &[Vec<u8>]) -> Vec<bool> {
    names.iter().enumerate().map(|(at, name)| !names[..at].contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, threads};

    #[test]
    fn each_node_has_one_first_rank() {
        let names = ["b", "a", "b", "c", "a"].map(|name| name.as_bytes().to_vec());
        assert_eq!(first_of_each(&names), [true, true, false, true, false]);
        let here = threads::run(3, Options::default(), |world| is_first_on_node(&*world.group()));
        assert_eq!(here.expect("all ranks call it"), [true, false, false]);
    }
}
