//! A user by number or by name.

use toml::de::DeValue;

use super::tree::Field;

/// Where names stand. Directories such as LDAP are not asked: a start must not wait for them.
const PASSWD: &str = "/etc/passwd";

/// Reads `1000` or `"www-data"`; a name is looked up once, here.
pub(super) fn read(field: &Field<'_>) -> Option<u32> {
    match field.value {
        DeValue::Integer(_) => field.count(0..=u32::MAX - 1),
        DeValue::String(name) => match std::fs::read_to_string(PASSWD) {
            Ok(users) => uid_of(&users, name)
                .or_else(|| field.wrong(&format!("must be a user of {PASSWD}, or a number such as 1000"))),
            Err(cause) => field.wrong(&format!("but {PASSWD} cannot be read ({cause}); give the number")),
        },
        _ => field.wrong("must be a user's number or name, such as 1000 or \"www-data\""),
    }
}

fn uid_of(passwd: &str, name: &str) -> Option<u32> {
    passwd.lines().find_map(|line| {
        let mut parts = line.split(':');
        (parts.next() == Some(name) && !name.is_empty()).then(|| parts.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::uid_of;

    #[test]
    fn a_name_is_found_whole_and_nothing_else_is_taken_for_it() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33::/var/www:\nbroken:x\n:x:7:7::/:\n";
        let known = ["root", "www-data", "www", "broken", "", "x"].map(|name| uid_of(passwd, name));
        assert_eq!(known, [Some(0), Some(33), None, None, None, None]);
    }
}
