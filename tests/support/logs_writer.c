/* Writes numbered lines of 100 bytes to stdout, one write(2) each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    long count = argc > 1 ? atol(argv[1]) : 0;
    char line[128];
    for (long i = 0; i < count; i++) {
        memset(line, '.', sizeof line);
        int used = snprintf(line, sizeof line, "%012ld ", i);
        line[used] = '.';
        line[99] = '\n';
        if (write(1, line, 100) != 100)
            return 1;
    }
    return 0;
}
