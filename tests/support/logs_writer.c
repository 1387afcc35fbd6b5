/* Writes numbered lines of 100 bytes to stdout, one write(2) each; after every PART lines it waits for a byte on stdin. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    long count = argc > 1 ? atol(argv[1]) : 0;
    long part = argc > 2 ? atol(argv[2]) : count;
    char line[128], go;
    for (long i = 0; i < count; i++) {
        if (i > 0 && i % part == 0 && read(0, &go, 1) != 1)
            return 2;
        memset(line, '.', sizeof line);
        int used = snprintf(line, sizeof line, "%012ld ", i);
        line[used] = '.';
        line[99] = '\n';
        if (write(1, line, 100) != 100)
            return 1;
    }
    return 0;
}
