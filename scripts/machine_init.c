/* The first program of the machine's kernel: finds the disk, and makes way for the real init.
 *
 * Debian's own initrd serves every machine there is; under emulation it takes as long as all of systemd. What it does
 * for us is this: load the modules that lie beside it (0.ko, 1.ko, ...), mount the disk, and start what `init=` names
 * with the words that the kernel was given after two dashes.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void need(int result, const char *what) {
    if (result < 0) perror(what);
}

int main(int count, char **words) {
    char name[32], said[4096] = "";
    char *program = "/sbin/init";
    int read_only = 0, fd;
    (void)count;
    for (int number = 0; snprintf(name, sizeof name, "/%d.ko", number), (fd = open(name, O_RDONLY)) >= 0; number++) {
        need(syscall(SYS_finit_module, fd, "", 0), name);
        close(fd);
    }
    mkdir("/proc", 0755);
    need(mount("proc", "/proc", "proc", 0, NULL), "/proc");
    need(mount("dev", "/dev", "devtmpfs", 0, NULL), "/dev");
    fd = open("/proc/cmdline", O_RDONLY);
    need(read(fd, said, sizeof said - 1), "/proc/cmdline");
    for (char *word = strtok(said, " \n"); word && strcmp(word, "--"); word = strtok(NULL, " \n")) {
        if (!strcmp(word, "ro")) read_only = 1;
        if (!strncmp(word, "init=", 5)) program = word + 5;
    }
    mkdir("/root", 0755);
    need(mount("/dev/vda", "/root", "ext4", read_only ? MS_RDONLY : 0, "errors=remount-ro"), "/dev/vda");
    need(mount("/dev", "/root/dev", NULL, MS_MOVE, NULL), "/root/dev");
    need(mount("/proc", "/root/proc", NULL, MS_MOVE, NULL), "/root/proc");
    need(mount("sys", "/root/sys", "sysfs", 0, NULL), "/root/sys");
    need(chdir("/root"), "/root");
    need(mount(".", "/", NULL, MS_MOVE, NULL), "the new root");
    need(chroot("."), "the new root");
    words[0] = program;
    execv(program, words);
    perror(program);
    return 1;
}
