//! Slurm's compressed host lists: `node[01-03,07],login1` is four nodes and a login host.

/// Returns the first host of a list in Slurm's short form, or `None` if it is empty or not well formed.
///
/// The first host is the first in the list's own order, as `scontrol show hostnames` prints it.
pub(super) fn first_host(list: &str) -> Option<String> {
    expand(list)?.into_iter().next()
}

/// Expands a list: every bracket becomes its numbers, with their leading zeros.
pub(super) fn expand(list: &str) -> Option<Vec<String>> {
    let mut hosts = Vec::new();
    for item in split_outside_brackets(list)? {
        hosts.extend(expand_item(item)?);
    }
    Some(hosts)
}

/// Splits at the commas outside of brackets.
fn split_outside_brackets(list: &str) -> Option<Vec<&str>> {
    let mut items = Vec::new();
    let (mut start, mut depth) = (0, 0usize);
    for (i, c) in list.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.checked_sub(1)?,
            ',' if depth == 0 => {
                items.push(&list[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    items.push(&list[start..]);
    (depth == 0).then_some(items)
}

/// Expands one item. `rack[1-2]node[0-1]` is four hosts; the last bracket varies fastest.
fn expand_item(item: &str) -> Option<Vec<String>> {
    let Some(open) = item.find('[') else {
        return (!item.is_empty()).then(|| vec![item.to_owned()]);
    };
    let close = open + item[open..].find(']')?;
    let rest = &item[close + 1..];
    let tails = if rest.is_empty() { vec![String::new()] } else { expand_item(rest)? };
    let mut hosts = Vec::new();
    for number in numbers(&item[open + 1..close])? {
        hosts.extend(tails.iter().map(|tail| format!("{}{number}{tail}", &item[..open])));
    }
    Some(hosts)
}

/// Expands `01-03,07` to 01, 02, 03, 07.
fn numbers(ranges: &str) -> Option<Vec<String>> {
    let mut all = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let width = first.len();
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last - first >= MAX_HOSTS {
            return None;
        }
        all.extend((first..=last).map(|n| format!("{n:0width$}")));
    }
    Some(all)
}

/// Largest range of host numbers. A longer range is a typing error and would exhaust the memory.
const MAX_HOSTS: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(list: &str, want: &[&str]) {
        assert_eq!(expand(list).as_deref(), Some(&want.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>()[..]));
    }

    #[test]
    fn a_list_is_expanded() {
        check("node1", &["node1"]);
        check("node1,node2", &["node1", "node2"]);
        check("node[01-03,07]", &["node01", "node02", "node03", "node07"]);
        check("node[09-11]", &["node09", "node10", "node11"]);
        check("a[1,3],b,c[2-3].example", &["a1", "a3", "b", "c2.example", "c3.example"]);
        check("rack[1-2]n[0-1]", &["rack1n0", "rack1n1", "rack2n0", "rack2n1"]);
    }

    #[test]
    fn the_first_host_is_the_first_of_the_list() {
        assert_eq!(first_host("node[07,01-03]").as_deref(), Some("node07"));
    }

    #[test]
    fn malformed_lists_are_rejected() {
        for list in ["", "node[", "node]1", "node[3-1]", "node[a-b]", "a,,b", "node[0-99999999999]"] {
            assert_eq!(expand(list), None, "{list}");
        }
    }
}
